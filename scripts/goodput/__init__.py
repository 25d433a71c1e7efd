"""Plans and simulates prefill and decode apart; README.md says in which order to read it."""
