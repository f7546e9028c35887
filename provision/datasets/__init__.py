"""Downloads, unpacks and checks data sets, each completely or not at all. Needs only Python and shardlab.errors."""
