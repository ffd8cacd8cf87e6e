"""Bounds on the arguments of one call, the same in every interface: HTTP, MCP, the clients, the program."""

MAX_FILTER_KEYS = 16
# for each key; texts and other values are counted apart, as 5 in a query string stands for one of each
MAX_FILTER_VALUES = 64
MAX_QUERY_CHARS = 8_192
# of one add or update: each may be a turn, and the queue is everybody's
MAX_MESSAGES = 2_048
# of an export that is imported: its lines, and the bytes of one
MAX_IMPORT_RECORDS = 1_000_000
MAX_RECORD_BYTES = 16 << 20
