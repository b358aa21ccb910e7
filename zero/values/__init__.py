"""The one reader and the one editor of parameters, and what an engine adopts at the start."""
