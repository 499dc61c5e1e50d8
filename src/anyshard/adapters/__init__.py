"""User state to shard tables and handles, and back. One file per kind of thing; an adapter never sees a path or a store."""
