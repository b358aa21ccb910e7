"""All that an engine makes for one state of its model: made, made anew, and lent to others."""
