"""The page: static files, served as they are, with no build step and no request to other hosts."""
