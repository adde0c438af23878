"""Training: settings, validation, the train step, objectives, optimizers, parallel schedules."""
