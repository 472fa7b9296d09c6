"""Tables and reports, made from the results that are stored: nothing here measures."""
