"""GPU descriptions, and those that ship with onerank."""
