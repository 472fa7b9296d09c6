"""Tables and pictures, made of the results that are stored: nothing here measures."""
