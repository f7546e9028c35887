"""The cluster file: the keys of each part, and the nodes, lease and folders of a cluster that follow from them."""
