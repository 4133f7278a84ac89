"""What a user would have other than it was captured, each an annotator of its own."""
