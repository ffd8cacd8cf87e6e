"""What requests and responses hold, as the OpenAPI page shows it: shapes alone, by what they are about."""
