"""What a build would make, take and give, told before it is made: `optimize --plan`."""
