"""Running: inputs that a built model runs on, tried until one runs, or the parts of the model that ran."""
