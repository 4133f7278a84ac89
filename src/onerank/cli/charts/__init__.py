"""Charts of the report pages as Plotly figures."""
