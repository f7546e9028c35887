"""Practice nodes: containers on this machine with their own systemd, sshd and apt, to rehearse a whole cluster."""
