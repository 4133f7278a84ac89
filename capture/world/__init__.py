"""The world of a job whose other ranks are not there: its groups, its calls, what they leave."""
