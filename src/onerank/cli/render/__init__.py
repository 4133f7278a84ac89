"""Results as tables and charts for people."""
