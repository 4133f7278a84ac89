"""One rank of an inference engine, measured over compositions of its batch."""
