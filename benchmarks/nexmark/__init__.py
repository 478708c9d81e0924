"""NEXMark: an auction house as three kinds of events, and the queries over it that need state."""
