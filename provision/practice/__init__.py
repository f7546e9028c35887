"""Practice nodes: machines that boot their own systemd, sshd and apt on this one, for rehearsing a whole cluster."""
