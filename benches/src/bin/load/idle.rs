//! Connections that do nothing, to see what they weigh.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::target::{Target, until_told};

pub(crate) async fn run(target: Arc<Target>, connections: u32) -> Value {
    let mut open = Vec::new();
    for _ in 0..connections {
        match target.connect().await {
            Ok(mut connection) => {
                // A request each, so that everything that a connection ever needs has been made.
                if target.complete(&mut connection).await.is_ok() {
                    open.push(connection);
                }
            }
            Err(_) => break,
        }
    }
    println!("{}", json!({ "open": open.len() }));
    until_told().await;
    open.retain(|connection| !connection.is_closed());
    json!({ "still_open": open.len() })
}
