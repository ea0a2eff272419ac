"""Rules and policies of other systems, reimplemented to compare with."""
