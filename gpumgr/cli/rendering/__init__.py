"""What commands print: values in, lines and tables out."""
