"""What an operator does, whatever runs it: classes of work, FLOPs and bytes."""
