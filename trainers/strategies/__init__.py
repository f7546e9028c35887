"""How one model is spread over ranks: one file a family, each naming its variants."""
