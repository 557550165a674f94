"""`halfbyte report`: what was measured, as one page."""
