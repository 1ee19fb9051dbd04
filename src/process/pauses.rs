//! What providers ask of this process, as it is shared with others.

use std::time::Duration;

use crate::{limit::redis::Pauses, upstream::EndpointStates};

impl Pauses for EndpointStates {
    fn matter(&self) -> bool {
        self.has_choice()
    }

    fn told(&self) -> Vec<(String, Duration)> {
        self.own_cooldowns()
    }

    fn heard(&self, name: &str, left: Duration) {
        self.heard_of_cooldown(name, left);
    }
}
