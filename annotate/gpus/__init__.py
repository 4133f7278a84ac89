"""GPUs as descriptions tell them, those that ship with onerank beside this code."""
