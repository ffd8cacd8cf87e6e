"""Jobs: requests that are accepted now and carried out later, also after a kill."""
