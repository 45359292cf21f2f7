"""Index expressions: build (`nodes`), meaning (`operations`), structure and values (`expression`),
bounds on tiles (`bounds`), CUDA text (`cuda`). Knows no array library and no kernel."""
