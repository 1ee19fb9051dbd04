//! TLS on both sides: the certificate that clients see, and the roots that upstreams are judged by.
//!
//! Nothing else touches rustls, but for the connector that dials upstreams. Where no certificate is configured or there,
//! a development certificate is made, so that the first start needs no preparation.

mod certificate;
mod client;
mod development;
mod error;
mod pem;

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use jiff::Timestamp;
use rustls::{
    InconsistentKeys, ServerConfig,
    crypto::{CryptoProvider, aws_lc_rs},
    server::{ServerSessionMemoryCache, WebPkiClientVerifier, danger::ClientCertVerifier},
    sign::{CertifiedKey, SingleCertAndKey},
    version::{TLS12, TLS13},
};

pub use self::{
    certificate::Certificate,
    client::{store_config, upstream_config},
    error::{Hint, Section, TlsError},
};
use self::{
    certificate::describe,
    pem::{certificates_in, key_in},
};
use crate::config;

/// Sessions that can be resumed without a full handshake. SDKs open new connections all the time.
const RESUMABLE_SESSIONS: usize = 10_240;

/// What the listeners serve, and what the log says of it. Where neither file exists, a development certificate is made first.
///
/// Files are read, and perhaps written: call this before serving, and again to take up renewed files.
pub fn server_config(tls: &config::Tls) -> Result<(Arc<ServerConfig>, Certificate), TlsError> {
    let now = Timestamp::now();
    let there = is_there(tls).or_else(|_| {
        // Another process may be between its two files.
        let _lock = development::lock(tls);
        is_there(tls)
    })?;
    if !there {
        development::make(tls)?;
    }
    let chain = certificates_in(&tls.certificate)?;
    let key = key_in(&tls.private_key)?;
    let certificate = describe(&chain[0], &tls.certificate, now)?;

    let provider = provider();
    let certified = CertifiedKey::from_der(chain, key, &provider)
        .map_err(|source| unusable(&tls.certificate, &tls.private_key, source))?;
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&TLS13, &TLS12])
        .expect("aws-lc-rs has cipher suites for both versions");
    let builder = match &tls.client_ca_file {
        Some(path) => builder.with_client_cert_verifier(clients_of(path, provider)?),
        None => builder.with_no_client_auth(),
    };
    let mut config = builder.with_cert_resolver(Arc::new(SingleCertAndKey::from(certified)));
    config.alpn_protocols = vec![b"h2".into(), b"http/1.1".into()];
    config.session_storage = ServerSessionMemoryCache::new(RESUMABLE_SESSIONS);
    // Early data could be replayed, and a replayed request costs money.
    config.max_early_data_size = 0;
    Ok((Arc::new(config), certificate))
}

/// Lets nobody in who shows no certificate of these authorities.
fn clients_of(path: &Path, provider: Arc<CryptoProvider>) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
    let roots = Arc::new(client::roots_in(path)?);
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider).build();
    Ok(verifier.expect("there is a root, and no revocation list that could be wrong"))
}

fn unusable(certificate: &Path, private_key: &Path, source: rustls::Error) -> TlsError {
    match source {
        rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
            TlsError::Mismatch { certificate: certificate.into(), private_key: private_key.into() }
        }
        source => TlsError::Unsuitable { path: private_key.into(), source },
    }
}

/// Given to every configuration by name, so that no default of the process can be missing or another.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

/// Whether the pair is there. A symbolic link to nowhere is there, for somebody meant a file by it.
fn is_there(tls: &config::Tls) -> Result<bool, TlsError> {
    let exists = |path: &PathBuf| match path.symlink_metadata() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(source) => Err(TlsError::Read { path: path.clone(), source }),
    };
    let half = |there: &PathBuf, missing: &PathBuf| {
        Err(TlsError::HalfMissing { there: there.clone(), missing: missing.clone() })
    };
    match (exists(&tls.certificate)?, exists(&tls.private_key)?) {
        (true, false) => half(&tls.certificate, &tls.private_key),
        (false, true) => half(&tls.private_key, &tls.certificate),
        (both, _) => Ok(both),
    }
}

#[cfg(test)]
mod tests {
    use std::{error::Error, fs, os::unix::fs::PermissionsExt, time::Duration};

    use rcgen::{CertificateParams, KeyPair, date_time_ymd};
    use rustls::pki_types::{PrivateKeyDer, pem::PemObject};
    use rustls::{
        ClientConfig, ClientConnection, ProtocolVersion, ServerConnection, SupportedProtocolVersion,
    };
    use tempfile::TempDir;
    use x509_parser::prelude::{FromDer, X509Certificate};

    use super::{client::roots_in, pem::holds, *};

    fn pair(folder: &TempDir) -> config::Tls {
        config::Tls {
            certificate: folder.path().join("certs/server.crt"),
            private_key: folder.path().join("certs/server.key"),
            client_ca_file: None,
        }
    }

    /// Writes a pair that is valid in these years.
    fn issued(folder: &TempDir, years: [i32; 2]) -> config::Tls {
        let tls = pair(folder);
        let mut params = CertificateParams::new(["api.example".to_owned(), "192.0.2.1".to_owned()]).unwrap();
        [params.not_before, params.not_after] = years.map(|year| date_time_ymd(year, 12, 31));
        let key = KeyPair::generate().unwrap();
        fs::create_dir_all(folder.path().join("certs")).unwrap();
        fs::write(&tls.certificate, params.self_signed(&key).unwrap().pem()).unwrap();
        fs::write(&tls.private_key, key.serialize_pem()).unwrap();
        tls
    }

    fn refusal(tls: &config::Tls) -> TlsError {
        server_config(tls).expect_err("the pair must be refused")
    }

    #[test]
    fn a_development_certificate_is_made_once() {
        let folder = TempDir::new().unwrap();
        let tls = pair(&folder);
        let (_, made) = server_config(&tls).unwrap();
        assert_eq!(made.names, ["localhost", "127.0.0.1", "::1"]);
        assert!(made.development);
        let days = made.expires_in(Timestamp::now()).as_secs_f64() / 86_400.0;
        assert!((823.9..=824.0).contains(&days), "{days}");
        assert_eq!(tls.private_key.metadata().unwrap().permissions().mode() & 0o777, 0o600);

        let files = [&tls.certificate, &tls.private_key].map(|path| fs::read(path).unwrap());
        let (_, again) = server_config(&tls).unwrap();
        assert_eq!(again, made);
        assert_eq!([&tls.certificate, &tls.private_key].map(|path| fs::read(path).unwrap()), files);
    }

    #[test]
    fn the_key_of_the_development_ca_is_nowhere() {
        let folder = TempDir::new().unwrap();
        let tls = pair(&folder);
        server_config(&tls).unwrap();
        let files: Vec<_> =
            fs::read_dir(folder.path().join("certs")).unwrap().map(|file| file.unwrap().path()).collect();
        assert_eq!(files.len(), 2, "{files:?}");
        let keys: Vec<_> = PrivateKeyDer::pem_slice_iter(&fs::read(&tls.private_key).unwrap()).collect();
        assert_eq!(keys.len(), 1);
        assert!(!holds(&fs::read(&tls.certificate).unwrap(), "PRIVATE KEY"));

        let chain = certificates_in(&tls.certificate).unwrap();
        let public = |der| X509Certificate::from_der(der).unwrap().1.public_key().raw.to_vec();
        assert_eq!(chain.len(), 2);
        let key = KeyPair::from_pem(&fs::read_to_string(&tls.private_key).unwrap()).unwrap();
        let (leaf, authority) = (public(&chain[0]), public(&chain[1]));
        assert_ne!(leaf, authority);
        assert!(leaf.ends_with(key.public_key_raw()) && !authority.ends_with(key.public_key_raw()));
    }

    #[test]
    fn both_names_may_have_no_folder_in_common_and_one_may_be_made() {
        let folder = TempDir::new().unwrap();
        let tls = config::Tls {
            certificate: folder.path().join("public/a.crt"),
            private_key: folder.path().join("private/deep/a.key"),
            client_ca_file: None,
        };
        assert!(server_config(&tls).is_ok());
    }

    #[test]
    fn starts_in_the_same_instant_agree_on_one_pair() {
        let folder = TempDir::new().unwrap();
        let tls = pair(&folder);
        std::thread::scope(|scope| {
            let starts: Vec<_> = (0..8).map(|_| scope.spawn(|| server_config(&tls).unwrap().1)).collect();
            let mut made = starts.into_iter().map(|start| start.join().unwrap());
            let first = made.next().unwrap();
            assert!(made.all(|other| other == first));
        });
    }

    #[test]
    fn a_folder_that_cant_be_written_is_named() {
        let folder = TempDir::new().unwrap();
        // No user may make a folder there, not even root.
        let tls = config::Tls {
            certificate: "/proc/certs/a.crt".into(),
            private_key: "/proc/certs/a.key".into(),
            client_ca_file: None,
        };
        let text = refusal(&tls).to_string();
        assert!(text.contains("into /proc/certs: make the folder writable"), "{text}");

        // What is behind a file can't even be looked for.
        fs::write(folder.path().join("certs"), "").unwrap();
        assert!(matches!(refusal(&pair(&folder)), TlsError::Read { .. }));
    }

    #[test]
    fn a_given_pair_is_served() {
        let folder = TempDir::new().unwrap();
        let (config, certificate) = server_config(&issued(&folder, [2020, 9999])).unwrap();
        assert_eq!(certificate.names, ["api.example", "192.0.2.1"]);
        assert!(!certificate.development);
        assert_eq!(config.alpn_protocols, [b"h2".to_vec(), b"http/1.1".to_vec()]);
        assert_eq!(config.max_early_data_size, 0);
    }

    #[test]
    fn one_file_alone_is_refused_by_name() {
        let folder = TempDir::new().unwrap();
        let tls = issued(&folder, [2020, 2100]);
        fs::rename(&tls.private_key, folder.path().join("elsewhere")).unwrap();
        let text = refusal(&tls).to_string();
        assert!(text.contains("server.crt is there but") && text.contains("server.key is not"), "{text}");

        fs::rename(folder.path().join("elsewhere"), &tls.private_key).unwrap();
        fs::remove_file(&tls.certificate).unwrap();
        let text = refusal(&tls).to_string();
        assert!(text.contains("server.key is there but") && text.contains("server.crt is not"), "{text}");
        assert!(!tls.certificate.exists());
    }

    #[test]
    fn a_link_to_nowhere_makes_no_development_certificate() {
        let folder = TempDir::new().unwrap();
        let tls = pair(&folder);
        fs::create_dir(folder.path().join("certs")).unwrap();
        for path in [&tls.certificate, &tls.private_key] {
            std::os::unix::fs::symlink("/nowhere/at/all", path).unwrap();
        }
        assert!(matches!(refusal(&tls), TlsError::Read { path, .. } if path == tls.certificate));
    }

    #[test]
    fn garbage_is_told_from_damage() {
        let folder = TempDir::new().unwrap();
        let tls = issued(&folder, [2020, 2100]);
        let good = [&tls.certificate, &tls.private_key].map(|path| fs::read_to_string(path).unwrap());

        for garbage in [&b""[..], b"hello", &[0x30, 0x82, 0xff]] {
            fs::write(&tls.certificate, garbage).unwrap();
            assert!(matches!(
                refusal(&tls),
                TlsError::Absent { expected: Section::Certificate, hint: Hint::Nothing, .. }
            ));
        }
        fs::write(&tls.certificate, &good[0][..good[0].len() / 2]).unwrap();
        assert!(matches!(refusal(&tls), TlsError::Damaged { path, .. } if path == tls.certificate));
        fs::write(&tls.certificate, "-----BEGIN CERTIFICATE-----\naGVsbG8=\n-----END CERTIFICATE-----\n")
            .unwrap();
        assert!(matches!(refusal(&tls), TlsError::Malformed { path, .. } if path == tls.certificate));

        fs::write(&tls.certificate, &good[0]).unwrap();
        fs::write(&tls.private_key, "hello").unwrap();
        assert!(matches!(
            refusal(&tls),
            TlsError::Absent { expected: Section::Key, hint: Hint::Nothing, .. }
        ));
        fs::write(&tls.private_key, &good[1][..good[1].len() / 2]).unwrap();
        assert!(matches!(refusal(&tls), TlsError::Damaged { path, .. } if path == tls.private_key));
        fs::write(&tls.private_key, "-----BEGIN PRIVATE KEY-----\naGVsbG8=\n-----END PRIVATE KEY-----\n")
            .unwrap();
        assert!(matches!(refusal(&tls), TlsError::Unsuitable { path, .. } if path == tls.private_key));
    }

    #[test]
    fn swapped_and_encrypted_files_are_recognised() {
        let folder = TempDir::new().unwrap();
        let tls = issued(&folder, [2020, 2100]);
        let swapped = config::Tls {
            certificate: tls.private_key.clone(),
            private_key: tls.certificate.clone(),
            client_ca_file: None,
        };
        assert!(refusal(&swapped).to_string().contains("swapped"));
        fs::copy(&tls.certificate, &tls.private_key).unwrap();
        assert!(refusal(&tls).to_string().contains("swapped"));

        for text in [
            "-----BEGIN ENCRYPTED PRIVATE KEY-----\naGVsbG8=\n-----END ENCRYPTED PRIVATE KEY-----\n",
            "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-256-CBC,00\n\naGVsbG8=\n-----END RSA PRIVATE KEY-----\n",
        ] {
            fs::write(&tls.private_key, text).unwrap();
            let error = refusal(&tls).to_string();
            assert!(error.contains("openssl pkey"), "{error}");
        }
    }

    #[test]
    fn a_key_of_another_certificate_is_refused() {
        let folder = TempDir::new().unwrap();
        let tls = issued(&folder, [2020, 2100]);
        fs::write(&tls.private_key, KeyPair::generate().unwrap().serialize_pem()).unwrap();
        assert!(matches!(refusal(&tls), TlsError::Mismatch { .. }));
    }

    #[test]
    fn a_certificate_out_of_its_time_is_refused_with_the_date() {
        let folder = TempDir::new().unwrap();
        let text = refusal(&issued(&folder, [2020, 2021])).to_string();
        assert!(text.contains("expired at 2021-12-31T00:00:00Z: renew it"), "{text}");
        assert!(!text.contains("development"), "{text}");
        let text = refusal(&issued(&folder, [2100, 2101])).to_string();
        assert!(text.contains("not valid before 2100-12-31T00:00:00Z"), "{text}");
    }

    #[test]
    fn an_expired_development_certificate_says_how_to_get_a_new_one() {
        let folder = TempDir::new().unwrap();
        let tls = pair(&folder);
        server_config(&tls).unwrap();
        let leaf = &certificates_in(&tls.certificate).unwrap()[0];
        let later = Timestamp::now() + Duration::from_secs(825 * 86_400);
        let error = describe(leaf, &tls.certificate, later).expect_err("825 days are over");
        assert!(error.to_string().contains("remove it and its key"), "{error}");
    }

    /// The two ends talk in memory until both have what they need.
    fn shake_hands(
        client: ClientConfig,
        server: Arc<ServerConfig>,
        name: &'static str,
    ) -> Result<ClientConnection, rustls::Error> {
        let mut client = ClientConnection::new(Arc::new(client), name.try_into().unwrap())?;
        let mut server = ServerConnection::new(server)?;
        while client.is_handshaking() || server.is_handshaking() {
            let mut wire = Vec::new();
            client.write_tls(&mut wire).unwrap();
            server.read_tls(&mut wire.as_slice()).unwrap();
            server.process_new_packets()?;
            wire.clear();
            server.write_tls(&mut wire).unwrap();
            client.read_tls(&mut wire.as_slice()).unwrap();
            client.process_new_packets()?;
        }
        Ok(client)
    }

    fn client(ca_file: &Path, version: &'static SupportedProtocolVersion) -> ClientConfig {
        ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[version])
            .unwrap()
            .with_root_certificates(roots_in(ca_file).unwrap())
            .with_no_client_auth()
    }

    #[test]
    fn a_client_that_trusts_only_the_one_file_connects() {
        let folder = TempDir::new().unwrap();
        let tls = pair(&folder);
        let (server, _) = server_config(&tls).unwrap();
        for (version, number) in [(&TLS13, ProtocolVersion::TLSv1_3), (&TLS12, ProtocolVersion::TLSv1_2)] {
            for name in development::NAMES {
                let mut config = client(&tls.certificate, version);
                config.alpn_protocols = vec![b"http/1.1".into(), b"h2".into()];
                let connection = shake_hands(config, server.clone(), name).unwrap();
                assert_eq!(connection.protocol_version(), Some(number));
                assert_eq!(connection.alpn_protocol(), Some(&b"h2"[..]));
            }
        }
        assert!(shake_hands(client(&tls.certificate, &TLS13), server, "example.com").is_err());
    }

    fn trusting(ca_file: PathBuf) -> config::Connection {
        config::Connection { ca_file: Some(ca_file), ..config::Connection::default() }
    }

    #[test]
    fn an_upstream_is_offered_http2_only_where_that_is_asked_for() {
        let folder = TempDir::new().unwrap();
        let (server, _) = server_config(&pair(&folder)).unwrap();
        for (http2, chosen) in [(true, &b"h2"[..]), (false, b"http/1.1")] {
            let connection = config::Connection { http2, ..trusting(pair(&folder).certificate) };
            let client = ClientConfig::clone(&upstream_config(&connection).unwrap());
            let connected = shake_hands(client, server.clone(), "localhost").unwrap();
            assert_eq!(connected.alpn_protocol(), Some(chosen));
        }
    }

    #[test]
    fn an_upstream_is_judged_by_its_ca_file_alone() {
        let [own, other] = [TempDir::new().unwrap(), TempDir::new().unwrap()];
        let (server, _) = server_config(&pair(&own)).unwrap();
        server_config(&pair(&other)).unwrap();
        let to_upstream =
            |folder| ClientConfig::clone(&upstream_config(&trusting(pair(folder).certificate)).unwrap());
        let connection = shake_hands(to_upstream(&own), server.clone(), "localhost").unwrap();
        assert_eq!(connection.alpn_protocol(), Some(&b"http/1.1"[..]));
        assert!(shake_hands(to_upstream(&other), server, "localhost").is_err());
    }

    #[test]
    fn a_ca_file_without_certificates_is_refused() {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("roots.pem");
        let error = upstream_config(&trusting(path.clone())).expect_err("there is no file");
        assert!(matches!(&error, TlsError::Read { .. }));
        assert!(error.source().is_some());
        fs::write(&path, "").unwrap();
        assert!(matches!(upstream_config(&trusting(path)), Err(TlsError::Absent { .. })));
    }
}
