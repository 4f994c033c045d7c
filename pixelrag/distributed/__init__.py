"""Process groups, collectives and random-number replay: what every engine stands on."""
