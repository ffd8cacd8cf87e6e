"""The Inspector: read-only pages of `undertow serve --inspect` over the calls of the API."""
