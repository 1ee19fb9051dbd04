//! Whom to trust in TLS, and who to be: `ca_file`, `client_certificate` and `client_key`.

use std::path::PathBuf;

use super::{ClientCertificate, field::Field, table::TableReader};

/// The files, none of which is opened here. Where nothing is `encrypted`, each key is refused: it is for `schemes`.
pub(super) fn certificates(
    table: &mut TableReader<'_>,
    encrypted: bool,
    schemes: &str,
) -> (Option<PathBuf>, Option<ClientCertificate>) {
    let fields = ["ca_file", "client_certificate", "client_key"].map(|key| table.field(key));
    if !encrypted {
        for field in fields.into_iter().flatten() {
            field.report_key(format!("`{}` is for {schemes}", field.key()));
        }
    }
    let [_, certificate, key] = fields;
    match (certificate, key) {
        (Some(alone), None) => alone.report_key("a `client_certificate` needs its `client_key`".to_owned()),
        (None, Some(alone)) => alone.report_key("a `client_key` needs its `client_certificate`".to_owned()),
        _ => {}
    }
    let [ca_file, certificate, private_key] = fields.map(|field| field.and_then(Field::path));
    let client = certificate.zip(private_key);
    (ca_file, client.map(|(certificate, private_key)| ClientCertificate { certificate, private_key }))
}
