"""What a CloudLab experiment says about itself: its manifests, and the note about who created it."""
