"""Graph in, graph out: what crosses the iteration boundary, what ranks exchange, what is merged or fused."""
