"""Host and device memory with an owner: mappings, pools, storages that are bound to memory, shared memory."""
