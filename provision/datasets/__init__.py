"""Put a data set where runs read it: fetched, unpacked, checked, and whole or absent. Needs only Python and shardlab.errors."""
