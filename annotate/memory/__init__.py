"""Device memory of a step: what it holds, what the allocator reserves, what would make it fit."""
