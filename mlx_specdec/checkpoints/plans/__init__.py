"""What a conversion will write, worked out before anything is read: one plan a kind of source."""
