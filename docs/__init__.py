"""The pages that belong to no stage, what makes all pages, and the pictures on them."""
