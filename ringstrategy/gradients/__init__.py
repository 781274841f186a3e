"""From each rank's gradients to their mean on all ranks."""
