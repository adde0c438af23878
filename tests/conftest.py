"""Eight simulated devices for every test, set before JAX opens its backend."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
