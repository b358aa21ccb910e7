"""Host and device memory with an owner: mappings, arenas, storages that are bound to memory, shared regions."""
