"""A run's report for people: a page in Markdown or HTML, and a badge."""
