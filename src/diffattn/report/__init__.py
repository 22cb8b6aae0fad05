"""What the pages of results share: numbers as text, colours, figures, tables, the page."""
