"""Rows in; rendered, masked, tokenised documents out."""
