"""How a prediction was made: its arithmetic, term by term."""
