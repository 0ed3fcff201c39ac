"""From samples to better weights: SFT and GRPO, embedded. Import the modules; `options` alone is free of torch."""
