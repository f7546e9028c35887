"""What is trained: model, data, unit of work and loss; one file a family, each naming its variants."""
