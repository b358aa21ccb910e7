"""Host and device memory with an owner: mappings, arenas, storages that come and go, shared regions."""
