// SPDX-License-Identifier: Apache-2.0

// client is a client-go program like the kubelet: it makes a request every interval through a
// kubeconfig. It prints a line for each: how many milliseconds it took, as whom and with which
// certificate, or why it failed.
package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

func main() {
	if err := run(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, "client:", err)
		os.Exit(1)
	}
}

func run(kubeconfig, interval, total string) error {
	every, err := time.ParseDuration(interval)
	if err != nil {
		return err
	}
	lasting, err := time.ParseDuration(total)
	if err != nil {
		return err
	}
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	config.QPS = -1
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	ctx := context.Background()
	for end := time.Now().Add(lasting); time.Now().Before(end); time.Sleep(every) {
		began := time.Now()
		review, err := client.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
		took := time.Since(began).Milliseconds()
		if err != nil {
			fmt.Printf("failed %d %v\n", took, err)
			continue
		}
		certificate := strings.Join(review.Status.UserInfo.Extra["authentication.kubernetes.io/credential-id"], ",")
		fmt.Printf("ok %d %s %s\n", took, review.Status.UserInfo.Username, certificate)
	}
	return nil
}
