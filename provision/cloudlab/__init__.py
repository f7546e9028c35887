"""What provision does at CloudLab: the portal, its token, and the experiment that it creates there."""
