"""A new adapter distribution, conformant over its simulator from the first minute."""
